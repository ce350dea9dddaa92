"""One script a question; `results/` holds what each found, with machine, command and date."""
