"""From a model's files to a Program, weights, tokenizer and chat template."""
