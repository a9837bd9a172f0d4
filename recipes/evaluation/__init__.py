"""How well a model uses long contexts: teacher-forced, on the ranks that train it."""
