"""From logits to the next token: penalties, masks, the draw, log-probabilities, tokens yet pending."""
