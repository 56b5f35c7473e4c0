//! `fake-cri SOCKET [IMAGE...]`: serves a fake container runtime on a unix socket until it is killed.

use holdfast_testkit::fake_cri::FakeCri;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(socket) = arguments.next() else {
        return Err(std::io::Error::other("usage: fake-cri SOCKET [IMAGE...]"));
    };
    let fake = FakeCri::new();
    for image in arguments {
        fake.add_image(&image);
    }
    fake.serve(&socket)?;
    println!("serving on {socket}");
    tokio::signal::ctrl_c().await
}
