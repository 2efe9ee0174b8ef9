"""`specinfer tune --policy`: the training of the network of a speculation policy on logged steps."""
