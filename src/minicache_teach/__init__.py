"""What grades a class: submissions in sandboxes, platforms' sheets, similarity. A learner needs none of it."""
