"""Measuring: methods of decoding side by side on real prompts, and reports about them."""
