"""The bundled model, and files that lie beside the program."""
import os

from nanoeuler_parts.machine.kernels import folder_of_program

def beside_program(path):
    """The path if it exists, else the same path beside this program if that one exists.
    site-packages is shared by all packages, so pip installs data/ as nanoeuler_data/."""
    folder = folder_of_program()
    places = path, os.path.join(folder, path), os.path.join(folder, f"nanoeuler_{path}")
    return next(filter(os.path.exists, places), path)

# The bundled model.  data/MODEL.md describes its training data and its abilities.  Wherever a
# checkpoint is expected, `bundled` or the short name `box` means this model.
SHIPPED = "data/model.bin"
BUNDLED, BOX = "bundled", "box"

def bundled_path():
    """Where the bundled model is, if it is there"""
    return beside_program(SHIPPED)

def is_bundled(file):
    return os.path.realpath(file) == os.path.realpath(bundled_path())

def model_path(file):
    """The path of a checkpoint.  A file with the name `bundled` or `box` takes precedence over the
    bundled model."""
    bundled = file in (BUNDLED, BOX) and not os.path.exists(file)
    return bundled_path() if bundled else file

def shown_name(file):
    """A checkpoint's name in messages; the path of the bundled one may be deep in site-packages."""
    return BUNDLED if is_bundled(file) else file
