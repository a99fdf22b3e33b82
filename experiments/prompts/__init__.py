"""The prompts that runs are measured on, their loader, and a converter for public sets."""
