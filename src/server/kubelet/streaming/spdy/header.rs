//! Header blocks: name-value pairs, compressed by one zlib stream per direction for the life of a connection,
//! which both sides begin with the protocol's dictionary.

use std::sync::LazyLock;

use bytes::{BufMut, BytesMut};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::SpdyError;

/// Names (lowercase) and values, in order.
pub type Headers = Vec<(String, String)>;

/// The longest header block, uncompressed. The peers of a stream send a few hundred bytes.
pub(super) const MAX_BLOCK: usize = 64 * 1024;

/// Words of the dictionary that carry their length.
const WORDS: &str = "options|head|post|put|delete|trace|accept|accept-charset|accept-encoding|\
    accept-language|accept-ranges|age|allow|authorization|cache-control|connection|\
    content-base|content-encoding|content-language|content-length|content-location|\
    content-md5|content-range|content-type|date|etag|expect|expires|from|host|if-match|\
    if-modified-since|if-none-match|if-range|if-unmodified-since|last-modified|location|\
    max-forwards|pragma|proxy-authenticate|proxy-authorization|range|referer|retry-after|\
    server|te|trailer|transfer-encoding|upgrade|user-agent|vary|via|warning|\
    www-authenticate|method|get|status|200 OK|version|HTTP/1.1|url|public|set-cookie|\
    keep-alive|origin";
/// Rest of the dictionary, after the words.
const TAIL: &str = "1001012012022052063003023033043053063074024054064074084094104114124134144154164175025045\
    05203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request40\
    1 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 \
    Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, W\
    ed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/x\
    ml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sd\
    chcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";

static DICTIONARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut dictionary = Vec::new();
    for word in WORDS.split('|') {
        // No word is longer than 255 bytes.
        dictionary.extend([0, 0, 0, word.len() as u8]);
        dictionary.extend(word.as_bytes());
    }
    dictionary.extend(TAIL.as_bytes());
    dictionary
});

/// Compresses the header blocks of one direction.
#[derive(Debug)]
pub(super) struct Deflater(Compress);

impl Deflater {
    pub(super) fn new() -> Result<Self, SpdyError> {
        let mut zlib = Compress::new(Compression::best(), true);
        zlib.set_dictionary(&DICTIONARY)
            .map_err(|_| SpdyError::Headers("the dictionary is not accepted"))?;
        Ok(Self(zlib))
    }

    /// Appends the block of `headers` to `out`.
    pub(super) fn block<N: AsRef<str>, V: AsRef<str>>(
        &mut self,
        headers: &[(N, V)],
        out: &mut BytesMut,
    ) -> Result<(), SpdyError> {
        let mut plain = BytesMut::new();
        put_length(&mut plain, headers.len())?;
        for (name, value) in headers {
            for text in [name.as_ref(), value.as_ref()] {
                put_length(&mut plain, text.len())?;
                plain.put_slice(text.as_bytes());
            }
        }
        if plain.len() > MAX_BLOCK {
            return Err(SpdyError::Headers("they are too long"));
        }
        let mut rest = &plain[..];
        let mut chunk = [0; 1024];
        loop {
            let (taken, made) = (self.0.total_in(), self.0.total_out());
            (self.0)
                .compress(rest, &mut chunk, FlushCompress::Sync)
                .map_err(|_| SpdyError::Headers("compression failed"))?;
            rest = rest
                .get(count(self.0.total_in() - taken)..)
                .unwrap_or_default();
            let made = count(self.0.total_out() - made);
            out.put_slice(chunk.get(..made).unwrap_or_default());
            if rest.is_empty() && made < chunk.len() {
                return Ok(());
            }
        }
    }
}

/// Expands the header blocks of one direction.
#[derive(Debug)]
pub(super) struct Inflater(Decompress);

impl Inflater {
    pub(super) fn new() -> Self {
        Self(Decompress::new(true))
    }

    /// Every block must be expanded, in order, also one whose content is not wanted: the next one builds on it.
    pub(super) fn block(&mut self, mut packed: &[u8]) -> Result<Headers, SpdyError> {
        let mut plain = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            let (taken, made) = (self.0.total_in(), self.0.total_out());
            let result = self.0.decompress(packed, &mut chunk, FlushDecompress::Sync);
            packed = packed
                .get(count(self.0.total_in() - taken)..)
                .unwrap_or_default();
            let made = count(self.0.total_out() - made);
            plain.extend_from_slice(chunk.get(..made).unwrap_or_default());
            if plain.len() > MAX_BLOCK {
                return Err(SpdyError::Headers("they are too long"));
            }
            match result {
                Err(error) if error.needs_dictionary().is_some() => {
                    self.0
                        .set_dictionary(&DICTIONARY)
                        .map_err(|_| SpdyError::Headers("another dictionary is asked for"))?;
                }
                Err(_) => return Err(SpdyError::Headers("not a zlib stream")),
                Ok(Status::StreamEnd) => {
                    return Err(SpdyError::Headers("the zlib stream ends early"));
                }
                Ok(Status::Ok | Status::BufError) if made == chunk.len() => {}
                Ok(_) if packed.is_empty() => return parse(&plain),
                Ok(_) if made == 0 => return Err(SpdyError::Headers("not a zlib stream")),
                Ok(_) => {}
            }
        }
    }
}

/// A count of bytes that fits a buffer of this process.
fn count(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn put_length(out: &mut BytesMut, length: usize) -> Result<(), SpdyError> {
    let length = u32::try_from(length).map_err(|_| SpdyError::Headers("they are too long"))?;
    out.put_u32(length);
    Ok(())
}

fn parse(mut plain: &[u8]) -> Result<Headers, SpdyError> {
    let pairs = take_length(&mut plain)?;
    let mut headers = Headers::new();
    for _ in 0..pairs {
        let name = take_text(&mut plain)?;
        let value = take_text(&mut plain)?;
        headers.push((name, value));
    }
    Ok(headers)
}

fn take_length(plain: &mut &[u8]) -> Result<usize, SpdyError> {
    let (length, rest) = plain.split_first_chunk::<4>().ok_or(SHORT)?;
    *plain = rest;
    usize::try_from(u32::from_be_bytes(*length)).map_err(|_| SHORT)
}

fn take_text(plain: &mut &[u8]) -> Result<String, SpdyError> {
    let length = take_length(plain)?;
    let (text, rest) = plain.split_at_checked(length).ok_or(SHORT)?;
    *plain = rest;
    let text = std::str::from_utf8(text).map_err(|_| SpdyError::Headers("they are not UTF-8"))?;
    Ok(text.to_owned())
}

const SHORT: SpdyError = SpdyError::Headers("they end early");

/// Adler-32 of the dictionary, by which zlib streams name it.
#[cfg(test)]
pub(super) fn dictionary_id() -> u32 {
    let (mut a, mut b) = (1u32, 0u32);
    for byte in DICTIONARY.iter() {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    (b << 16) | a
}
