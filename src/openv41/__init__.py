"""Independent PyTorch implementation of the DeepSeek-V4.1-Flash system."""
