//! Which expert lives where: slots, policy, tickets. The forebay itself.
