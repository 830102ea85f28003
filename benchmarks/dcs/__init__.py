"""The checkpoint service beside files, torch DCP, SGLang's own updates and Ray's object store."""
