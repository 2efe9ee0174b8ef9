"""What is raised at the edge, before any work starts. Each message names the field and the remedy."""


class ModelError(ValueError):
    """A model folder or name that cannot be used as it is."""


class RequestError(ValueError):
    """A prompt or its parameters that cannot be served."""
