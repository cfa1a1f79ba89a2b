"""Pretraining and fine-tuning through the Hugging Face Trainer."""
