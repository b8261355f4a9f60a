"""Shadow of a product's backend: what its tools need from outside of a sandbox, served on this machine."""
