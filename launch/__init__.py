"""Programs that run the library; nothing imports them."""
