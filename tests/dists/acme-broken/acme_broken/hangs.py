import time

time.sleep(600)  # for the Acme daemon
