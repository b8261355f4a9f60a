"""Models: sizes, torchtitan specs, the trainer, Hugging Face import and export."""
