"""What gives a sandbox away to a program that looks: a probe that runs inside, and what its facts tell."""
