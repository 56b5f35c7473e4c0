//! `/dev/kmsg`: one record a read, of which a new reader gets all that the kernel still has.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// More than the kernel makes of a record.
const MAX_RECORD: usize = 16 << 10;
/// Records in a row that cannot be read, after which the device is given up.
const MAX_UNREADABLE: u32 = 100;

/// A reader.
pub(super) struct Kmsg {
    device: AsyncFd<File>,
    buffer: Vec<u8>,
}

/// Result of a read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<'a> {
    /// The next record.
    Record(&'a [u8]),
    /// The kernel overwrote records before they were read.
    Overrun,
    /// There is no more for now.
    Drained,
}

impl Kmsg {
    /// Opens the device at `path`.
    ///
    /// # Errors
    /// When it is not there, or this process may not read it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(OFlag::O_NONBLOCK.bits());
        Self::of(options.open(path)?)
    }

    #[expect(
        deprecated,
        reason = "its successor is unsafe to call; a file owns its descriptor and never changes it"
    )]
    fn of(file: File) -> io::Result<Self> {
        Ok(Self {
            device: AsyncFd::with_interest(file, Interest::READABLE)?,
            buffer: vec![0; MAX_RECORD],
        })
    }

    /// Reads without waiting.
    ///
    /// # Errors
    /// When the device cannot be read any more.
    pub(super) fn next(&mut self) -> io::Result<Next<'_>> {
        next(self.device.get_ref(), &mut self.buffer)
    }

    /// Waits until there is more, after [`Next::Drained`]. May return early.
    ///
    /// # Errors
    /// When the device cannot be waited for.
    pub(super) async fn more(&self) -> io::Result<()> {
        // What comes from here on makes it ready again.
        self.device.readable().await?.clear_ready();
        Ok(())
    }
}

/// Reads the next record of `device` into `buffer`.
fn next(mut device: impl Read, buffer: &mut [u8]) -> io::Result<Next<'_>> {
    let mut unreadable = 0;
    let length = loop {
        match device.read(buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => break length,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => return Ok(Next::Drained),
                ErrorKind::BrokenPipe => return Ok(Next::Overrun),
                ErrorKind::Interrupted => {}
                // A record that does not fit. The next read is of the next one.
                ErrorKind::InvalidInput if unreadable < MAX_UNREADABLE => unreadable += 1,
                _ => return Err(error),
            },
        }
    };
    Ok(Next::Record(buffer.get(..length).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::errno::Errno;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;

    /// A device whose reads fail so often with the first of these errors, then with the second, then give `x`.
    struct Failing(Vec<(u32, Errno)>);

    impl Read for Failing {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.retain(|(left, _)| *left > 0);
            match self.0.first_mut() {
                Some((left, errno)) => {
                    *left -= 1;
                    Err(io::Error::from_raw_os_error(*errno as i32))
                }
                None => {
                    buffer[0] = b'x';
                    Ok(1)
                }
            }
        }
    }

    #[test]
    fn overwritten_records_are_an_overrun_and_records_that_do_not_fit_are_passed_over() {
        let mut buffer = [0; 4];
        let mut device = Failing(vec![
            (1, Errno::EPIPE),
            (2, Errno::EINVAL),
            (1, Errno::EINTR),
        ]);
        assert_eq!(next(&mut device, &mut buffer).unwrap(), Next::Overrun);
        let found = next(&mut device, &mut buffer).unwrap();
        assert_eq!(found, Next::Record(b"x"), "what follows is read");
        let mut device = Failing(vec![(MAX_UNREADABLE + 1, Errno::EINVAL)]);
        let error = next(&mut device, &mut buffer).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    #[tokio::test]
    async fn each_read_is_a_record_and_a_device_that_is_gone_an_error() {
        // Keeps records apart, as the device does.
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_NONBLOCK);
        let (ours, theirs) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        let (mut kmsg, mut log) = (Kmsg::of(ours.into()).unwrap(), File::from(theirs));
        assert_eq!(kmsg.next().unwrap(), Next::Drained);
        for round in 0..2 {
            log.write_all(b"one").unwrap();
            log.write_all(b"two").unwrap();
            kmsg.more().await.unwrap();
            assert_eq!(kmsg.next().unwrap(), Next::Record(b"one"), "{round}");
            assert_eq!(kmsg.next().unwrap(), Next::Record(b"two"));
            assert_eq!(kmsg.next().unwrap(), Next::Drained);
        }
        drop(log);
        kmsg.more().await.unwrap();
        let error = kmsg.next().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }
}
