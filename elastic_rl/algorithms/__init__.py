"""Pure tensor functions: advantage estimators and policy losses, and the registry that names them."""
