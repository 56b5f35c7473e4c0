//! The etcd and kube-apiserver that the tests of a run share: `test-cluster DIRECTORY`. Ends with its standard input.

use std::io::Read as _;
use std::path::Path;

use holdfast_testkit::envtest::EnvTest;

fn main() {
    let dir = std::env::args_os()
        .nth(1)
        .expect("usage: test-cluster DIRECTORY");
    let _env = EnvTest::start_to_be_shared(Path::new(&dir));
    // A pipe that breaks is an end as well.
    drop(std::io::stdin().read_to_end(&mut Vec::new()));
}
