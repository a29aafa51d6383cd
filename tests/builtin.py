"""The built-in model's checkpoint, opened once: that alone takes seconds."""

import functools

from longhelix.models.model_files import open_checkpoint


@functools.cache
def builtin():
    return open_checkpoint("builtin")
