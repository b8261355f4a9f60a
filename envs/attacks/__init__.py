"""The published attacks: what agents try for a reward or on the machine, each ready to be tried on a backend of yours.

`python -m envs.attacks --backend bubblewrap` tries all of them; docs/attacks.md says what they are and what holds.
"""
