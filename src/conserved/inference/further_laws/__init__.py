"""Laws that typing alone does not find: from inputs, missing gradients, tables read in part, and unknown operations."""
