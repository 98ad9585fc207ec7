"""An object that runs code when it is unpickled."""

import os
from pathlib import Path


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)
