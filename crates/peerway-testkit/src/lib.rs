//! peerway-testkit
