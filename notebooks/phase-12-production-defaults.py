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
#
# A made-up vocabulary of 38,746 tokens: all bytes, numbers, and groups of two and three letters, with and without
# a space before them. An answer is held to an expression with a name and a number. For each of its tokens: how many tokens
# are allowed there, and how often the automaton is asked to find them.

# %% alt="Along the 14 tokens of an answer, on a logarithmic axis: tokens allowed, and calls of the automaton. Both are at most about 100 at the fixed text and at the number; in the five steps inside the name 36,500 tokens are allowed, and the automaton is asked 1,400 times."
from itertools import product
from string import ascii_lowercase

from minicache.structured.regex import Automaton
from minicache.structured.token_masks import TokenMasks, TokenTrie

groups = [
    "".join(letters) for count in (2, 3) for letters in product(ascii_lowercase, repeat=count)
]
numbers = [str(number) for number in range(10, 1000)]
texts = [space + text for space in ("", " ") for text in groups + numbers]
texts += ['{"', '": "', '", "', '":', '"}']
tokens = [b"", *(bytes([byte]) for byte in range(256)), *map(str.encode, texts)]
trie = TokenTrie(tokens)
ids = {text: token_id for token_id, text in enumerate(tokens)}


class Counted(Automaton):
    """Counts how often it is asked."""

    num_asked = 0

    def next_states(self, state):
        self.num_asked += 1
        return super().next_states(state)


def along(expression, answer):
    """For each token of an answer: how many are allowed there, and how often the automaton is asked."""
    masks, found = TokenMasks(Counted(expression), trie, [0]), []
    state = masks.automaton.start
    for text in answer:
        masks.automaton.num_asked = 0
        found.append((len(masks.allowed(state)), masks.automaton.num_asked))
        state = masks.advance(state, ids[text.encode()])
    return found


expression = r'\{"name": "[a-z ]{1,24}", "age": (0|[1-9]\d?)\}'
answer = ["{", '"', "nam", "e", '": "', "ada", " lo", "vel", "ace", '", "', "age", '":', " 36", "}"]
allowed, asked = zip(*along(expression, answer))
print(f"{len(tokens):,} tokens, {len(trie.children):,} nodes")
for text, its_allowed, its_asked in zip(answer, allowed, asked):
    print(f"{text:>5}: one of {its_allowed:6,} tokens, the automaton asked {its_asked:5,} times")
curves = {"tokens allowed": allowed, "the automaton is asked": asked}
nb.lines(range(len(answer)), curves, "tokens of the answer so far", "", yscale="log")

# %% [markdown]
# Where little is allowed, little is looked at. Inside the name nearly every token is allowed, and has to be
# listed. The automaton is asked once for each beginning that longer tokens share.
#
# **Question.** Behind `"age":` comes a space and a number. By hand: how many of the tokens are allowed there?

# %%
allowed_before_the_number = None

# %%
nb.check(allowed_before_the_number, allowed[answer.index(" 36")])

# %% [markdown]
# Now a batch. MiniGPT continues "Yesterday my sister" at temperature 4, in sixteen rows: eight are free, eight are held to
# its grammar. `SentenceMasks` gives the tokens that the parser would take next, `mask_rows` rules out the others.

# %%
import torch

from minicache.engine.masking import mask_rows
from minicache.errors import UngrammaticalError
from minicache.grammar import Tokenizer, check_text
from minicache.model import load_minigpt
from minicache.structured.sentences import SentenceMasks

model, tokenizer = load_minigpt(), Tokenizer()
masks, torch_rng = SentenceMasks(tokenizer), torch.Generator().manual_seed(0)
prompt = tokenizer.encode("Yesterday my sister")
batch, ended = [list(prompt) for _ in range(16)], [False] * 16
for _ in range(16):
    with torch.inference_mode():
        logits = model(torch.tensor(batch))[:, -1] / 4.0
    may = torch.zeros(8, tokenizer.vocab_size, dtype=torch.bool)
    for number, text in enumerate(batch[8:]):
        may[number, list((0,) if ended[8 + number] else masks.allowed(text))] = True
    picked = torch.multinomial(
        mask_rows(logits, range(8, 16), may).softmax(-1), 1, generator=torch_rng
    )
    for number, token_id in enumerate(picked.flatten().tolist()):
        ended[number] |= token_id == tokenizer.end_token_id
        batch[number].append(token_id)


def is_grammatical(text):
    """Whether a text, which may break off, is MiniGPT's English."""
    try:
        check_text(tokenizer.decode_words(text), unfinished=True)
    except UngrammaticalError:
        return False
    return True


for name, its_texts in (("free", batch[:8]), ("held", batch[8:])):
    its_texts = [text[: text.index(0)] if 0 in text else text for text in its_texts]
    print(f"{name}: {sum(map(is_grammatical, its_texts))} of 8 are grammatical, such as")
    print("  ", " ".join(tokenizer.decode_words(its_texts[0])))

# %% [markdown]
# **Question.** Two tokens are allowed in a row. The model gives them probabilities of 0.02 and 0.06. With which probability
# is the second one picked behind the mask?

# %%
probability_of_the_second = None

# %%
row = torch.tensor([[0.02, 0.06, 0.92]]).log()
right = mask_rows(row, [0], torch.tensor([[True, True, False]])).softmax(-1)[0, 1]
nb.check(probability_of_the_second, round(float(right), 2))
