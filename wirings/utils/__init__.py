"""Small tools that every package may use: atomic files, the cache folder, checks of numbers, text tables,
example inputs."""
