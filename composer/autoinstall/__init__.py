"""`composer autoinstall`: from a bare repository to an environment that tasks can be made of, by two models.

A proposer reads the repository and names commands that a developer would run, with what they print when all is well. An
installer then sets up the machine until some of them, chosen at random, do so. It has a few tries; a repository that it
does not get to work is dropped. What either of them says is believed nowhere: commands run in fresh sandboxes, on the
repository's own files (verify.py), and what the installer left on the machine is looked at before (guards.py).
"""
