//! Who may do what on the kubelet's API.
