//! `csi-driver NAME ROOT STATE`: serves a CSI driver below a kubelet's root directory until standard input ends.

use holdfast_testkit::csi::{CsiOptions, serve};

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, root, state] = arguments.as_slice() else {
        return Err(std::io::Error::other("usage: csi-driver NAME ROOT STATE"));
    };
    serve(CsiOptions::new(name, root, state))
}
