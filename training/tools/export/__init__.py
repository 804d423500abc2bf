"""A checkpoint's models as Hugging Face folders: __main__.py is the program, model_folder.py writes a folder."""
