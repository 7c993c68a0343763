"""Text and tokens: tokenizer, chat template, and an answer's way back to text. No I/O after start-up."""
