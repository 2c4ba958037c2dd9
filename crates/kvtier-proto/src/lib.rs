//! Bytes of the LMCache MP protocol: operations, requests, responses, descriptors, pickles.
