"""Which k of n edges? One weight, many weights at once, one ranking over all of them, or shards on many processes."""
