"""What every HTTP app of Weft stands on, worker and gateway alike: ids, keys, limits, errors in one form."""
