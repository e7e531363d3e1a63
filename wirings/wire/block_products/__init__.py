"""Linear layers whose weight consists of blocks, most of them zero: products that skip the zeros on a GPU."""
