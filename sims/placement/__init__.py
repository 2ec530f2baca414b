"""Several services on one network in virtual time: engines that come and go as services are placed anew."""
