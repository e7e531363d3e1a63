"""Training: settings, results, and the tables made of them."""
