"""What Python, Keras and the machine give, made safe to rely on."""
