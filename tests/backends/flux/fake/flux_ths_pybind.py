"""In place of Flux's extension module, which is looked for and imported by nobody but Flux."""
