"""An SGLang server as its engine sees it: started here or external, and its health."""
