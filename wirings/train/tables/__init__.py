"""Tables of results: the paper's tables, the leaderboard of rules, and the sizes of networks."""
