"""What any layer of a transformer is made of: embedding, projection, norm, activation."""
