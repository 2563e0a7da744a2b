"""Assembly of the layers into the model. Report §2.1."""
