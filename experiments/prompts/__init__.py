"""The prompts that runs are measured on, and a reader of the forms that others publish."""
