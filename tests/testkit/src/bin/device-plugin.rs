//! `device-plugin DIRECTORY RESOURCE CALLS DEVICE...`: serves a device plugin in the directory where a kubelet takes registrations,
//! and appends its calls to the file CALLS. It registers anew when the kubelet has removed its socket, and runs until it is killed.

use std::fs::OpenOptions;
use std::io::{Error, Result, Write as _};
use std::path::Path;
use std::time::Duration;

use holdfast_testkit::device_plugin::DevicePlugin;

const PAUSE: Duration = Duration::from_millis(100);

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, resource, calls, devices @ ..] = arguments.as_slice() else {
        let usage = "usage: device-plugin DIRECTORY RESOURCE CALLS DEVICE...";
        return Err(Error::other(usage));
    };
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let directory = Path::new(directory);
    let socket = directory.join("test.sock");
    let mut calls = OpenOptions::new().create(true).append(true).open(calls)?;
    loop {
        tokio::time::sleep(PAUSE).await;
        // Of an earlier process.
        drop(std::fs::remove_file(&socket));
        // The kubelet makes the directory.
        let Ok(plugin) = DevicePlugin::start(&socket, &devices) else {
            continue;
        };
        plugin.gives_no_cdi();
        let kubelet = directory.join("kubelet.sock");
        let mut is_registered = false;
        while socket.exists() {
            if !is_registered {
                is_registered = plugin.register(&kubelet, resource).await.is_ok();
            }
            for call in plugin.calls() {
                writeln!(calls, "{call}")?;
            }
            tokio::time::sleep(PAUSE).await;
        }
        plugin.stop();
    }
}
