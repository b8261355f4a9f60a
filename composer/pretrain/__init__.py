"""Training before RL: the data mix, packing, continual pretraining and supervised fine-tuning."""
