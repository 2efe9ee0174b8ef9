"""Native CPU code in C++ and its calls from Python: linear layers, attention, decoder layers, walks, drafts."""
