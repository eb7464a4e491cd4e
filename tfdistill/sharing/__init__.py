"""What groups share between steps: students go out, teachers come in."""
