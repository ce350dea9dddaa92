# %% [markdown]
# # Phase 12: production defaults, measured
#
# TODO: introduction

# %%
MINE = False  # True: your own files; then restart the kernel and run all cells

from minicache_course import notebook as nb

nb.begin(12, mine=MINE)

# %% [markdown]
# ## 1. One step ahead

# %% [markdown]
# ## 2. Several kinds of cache

# %% [markdown]
# ## 3. Below the prefix cache

# %% [markdown]
# ## 4. Only what is allowed
