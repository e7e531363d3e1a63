"""Small tools that every package may use: atomic files, the cache folder, checks, text tables, example inputs."""
