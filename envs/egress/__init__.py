"""Egress: how a sandbox reaches the network, which is through one proxy outside of it, or not at all."""
